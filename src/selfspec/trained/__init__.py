"""Small trained parts: their files, their blocks, how their model is recognised."""
