"""What people see: events in, text out. Imports the standard library, msgspec, rich and the model.

`view` turns events, verdicts and seeds into plain lines and rows; every format is made from those.
"""
