"""`python -m curvcert` is the command line."""

from curvcert.cli import main

if __name__ == "__main__":
    main()
