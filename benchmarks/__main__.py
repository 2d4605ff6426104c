"""`python -m benchmarks`."""

from benchmarks.command_line import main

if __name__ == "__main__":
    main()
