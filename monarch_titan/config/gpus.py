"""How much memory a GPU has, by the name that ``monarch.gpu`` gives it."""

from __future__ import annotations

import difflib

from monarch_titan.config.errors import ConfigError

# GiB that torch reports as the total capacity: the least of what out-of-memory messages in public bug reports show, as
# in "a total capacity of 79.14 GiB", where A100 and H100 look alike. Less than the name says, because NVIDIA counts in
# 10^9 bytes and drivers keep some. By the data sheets: AMD Instinct MI300X 192, MI325X 256 and MI355X 288 GB; NVIDIA
# A100 80, H100 SXM 80 and H200 141 GB. A B200 has 180 or 192 GB by the source; the reports agree on 178.35 GiB.
GPUS = {
    "A100-80GB": 79.14,
    "H100-80GB": 79.14,
    "H200": 139.72,
    "B200": 178.35,
    "MI300X": 191.69,
    "MI325X": 255.69,
    "MI355X": 287.98,
}
"""Usable memory in GiB."""


def capacity(name: str) -> int:
    """Bytes that torch can use on the GPU of this name; case does not matter.

    Raises ConfigError, with the nearest name, for one that is not in the table.
    """
    by_name = {known.lower(): known for known in GPUS}
    if name.lower() in by_name:
        return int(GPUS[by_name[name.lower()]] * 2**30)
    near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.4)
    hint = f"did you mean {by_name[near[0]]}?" if near else "another GPU's memory has to be compared by hand."
    raise ConfigError(f'monarch.gpu must be one of {", ".join(GPUS)}, got "{name}"; {hint}')
