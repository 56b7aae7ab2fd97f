"""The project's own configuration sections and the loader that reads them from TOML."""
