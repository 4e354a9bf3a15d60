"""The commands `pdserve simulate` and `pdserve plan`. `simulate.py` and `plan.py` hold the flags and import little."""
