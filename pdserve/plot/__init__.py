"""Charts and pages of every command, as text of SVG and HTML. Pure functions, which import nothing that acts."""
