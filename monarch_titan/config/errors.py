"""The one exception for a user's mistake."""


class ConfigError(ValueError):
    """What the user asked for cannot be run; the message names the option, the rule and the value."""
