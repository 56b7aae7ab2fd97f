"""TorchTitan's Trainer with TorchFT fitted in, and what it needs: outer steps, healing, data, the CPU device."""
