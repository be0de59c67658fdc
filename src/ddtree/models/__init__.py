"""Models: the catalogue, how a model gets onto this machine, and how its weights become ours."""
