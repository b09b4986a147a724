"""``python -m envace``."""

from envace.cli import main

if __name__ == "__main__":
    main()
