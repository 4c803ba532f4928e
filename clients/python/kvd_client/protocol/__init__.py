"""The wire of kvd: messages, failure codes and codec; the one definition that daemon and clients share. Never opens a socket."""
