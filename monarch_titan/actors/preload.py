"""What a trainer imports, in the right order: the CPU device before TorchTitan.

The fork server loads this module before it forks; a trainer that was not forked loads it when it starts.
"""

from monarch_titan import upstream

upstream.install_cpu_device()

import monarch_titan.config_registry  # noqa: E402
import monarch_titan.training.trainer  # noqa: E402, F401
