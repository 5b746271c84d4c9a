"""Version: what plan files and the command line say they are of."""

__version__ = "0.1.0"
