"""The configuration from outside: what may be set, from where, within which limits; and which file a model's name means. It never acts on what it reads."""
