"""The verbs of the command line, a file each, named in `hetpipe.cli`.

`options` holds what is asked, `inputs` what is read and checked, `output` how it is printed. torch, NumPy
and matplotlib are imported where they are used.
"""
