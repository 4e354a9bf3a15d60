"""The commands `pdserve simulate`, `pdserve plan` and `pdserve bench`. The modules with their names hold the flags and
import little."""
