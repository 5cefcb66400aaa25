"""`python -m fdg` is `fdg`."""

from fdg.cli import main

main()
