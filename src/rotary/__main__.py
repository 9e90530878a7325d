"""`python -m rotary`, which torchrun needs: `torchrun --nproc-per-node=4 -m rotary doctor ...`."""

from .cli import main

if __name__ == "__main__":
    main()
