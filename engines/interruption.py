"""Imported first by a command: an interruption before `engines.errors.command` minds them ends it without a trace."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # whoever starts it may want it ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
