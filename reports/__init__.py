"""What people see: events in, text out. Imports the standard library, msgspec, rich and the model.

`view` turns a finding into plain rows and `campaign` a run; every format is made from those.
"""
