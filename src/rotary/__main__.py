"""The commands as a module, for torchrun: `torchrun --nproc-per-node=4 -m rotary doctor ...`."""

from .cli import main

if __name__ == "__main__":
    main()
