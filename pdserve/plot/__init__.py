"""Charts and pages of all commands, as SVG and HTML text. Pure functions, which import nothing that does I/O."""
