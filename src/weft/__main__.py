"""`python -m weft` is the command `weft`."""

from weft.cli.main import app

if __name__ == "__main__":
    app()
