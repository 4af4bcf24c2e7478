"""`python -m weft` is the command `weft`."""

import signal


def main() -> None:
    """Ctrl-C ends the command quietly also before the command itself runs."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from weft.cli.main import app

    signal.signal(signal.SIGINT, usual)
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
