"""Small published figures, and what the package makes of them; README.md beside this file has the sources."""
