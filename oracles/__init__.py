"""What must be true: references in integer torch arithmetic, and the properties built on them.

References compute every address from fields and every conversion from bit fields. They never look
at a tensor view, a stride of one, or a kernel.
"""
