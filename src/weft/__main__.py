"""`python -m weft` is the command `weft`."""

import errno
import signal
import sys


def main() -> None:
    """Ctrl-C ends the command quietly also before the command itself runs, and a full disk ends
    it in one line."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from weft.cli.main import app

    signal.signal(signal.SIGINT, usual)
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = error.filename or "the output"
        sys.stderr.write(f"weft: error: can't write {where}: {error.strerror}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
