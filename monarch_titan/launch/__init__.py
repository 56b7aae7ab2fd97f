"""One file a scheduler: where the hosts of a replica come from."""
