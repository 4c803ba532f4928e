"""The edge: sockets (server.py alone), conversations (session.py, sans-IO), token streams (stream.py), in-process channels. Never decides what runs."""
