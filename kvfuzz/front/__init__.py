"""What people start kvfuzz by: the command line and the pytest plugin.

Nothing here imports torch or triton, and nothing imports hypothesis at module level: the worker
process imports the main module of its parent again.
"""
