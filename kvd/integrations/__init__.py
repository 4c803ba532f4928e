"""kvd inside of other people's frameworks: its parts behind their interfaces. Imported by nobody here; each module needs the framework that it is named after."""
