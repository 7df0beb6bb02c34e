"""What turns things that people have into what the core works with: nested variables, modules, rows
of any kind, losses and arguments that may be wrong; and the core's values into what a person sees.
A reader of the core can leave this folder out.
"""
