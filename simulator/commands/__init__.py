"""The commands `pdserve simulate`, `pdserve plan` and `pdserve bench`. The modules with these names define the flags
and import little else."""
