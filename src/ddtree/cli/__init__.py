"""The command line: one file a verb. Environment variables are read here and nowhere else."""
