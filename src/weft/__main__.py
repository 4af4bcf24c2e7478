"""`python -m weft` is the command `weft`."""

import errno
import os
import signal
import sys


def main() -> None:
    """Ctrl-C ends the command quietly also before the command itself runs, and a full disk ends
    it in one line."""
    _open_standard_streams()
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


def _open_standard_streams() -> None:
    """Open those that the caller has closed. Otherwise, connections would get their numbers, and
    what is written to them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))


if __name__ == "__main__":
    main()
