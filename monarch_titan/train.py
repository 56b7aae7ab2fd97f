"""TorchTitan's own main with the CPU device in place: ``torchrun -m monarch_titan.train --module ... --config ...``.

For debugging one replica under torchrun on a machine without an accelerator; ``torchrun -m torchtitan.train`` does the
same where there is one.
"""

from monarch_titan import upstream

if __name__ == "__main__":
    upstream.install_cpu_device()

    from torchtitan.train import main

    main()
