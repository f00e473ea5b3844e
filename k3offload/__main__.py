"""``python -m k3offload``: the same as the command ``k3offload``."""

from .cli import main

if __name__ == "__main__":
    main()
