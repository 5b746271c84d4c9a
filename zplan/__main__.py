"""`python -m zplan`: the command line, as torchrun starts it."""

from zplan.cli import main

if __name__ == "__main__":
    main()
