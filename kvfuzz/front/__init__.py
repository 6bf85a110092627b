"""What people start kvfuzz by: the command line and the pytest plugin.

Nothing here imports torch or triton. `entry`, which a worker imports once more, and the plugin,
which is loaded in every project, import nothing heavy; the rest comes with the first command.
"""
