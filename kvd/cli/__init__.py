"""One module per command: a thin shell over the rooms or over the client. Holds no logic of its own and imports torch nowhere."""
