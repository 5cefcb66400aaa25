"""`python -m fdg` is `fdg`."""

from fdg.cli import main

if __name__ == "__main__":
    main()
