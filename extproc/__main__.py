"""`python -m extproc` is the `tidegate` command."""

from extproc.cli import main

if __name__ == "__main__":
    main()
