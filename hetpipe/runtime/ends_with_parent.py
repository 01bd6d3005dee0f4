"""To import this first lets a server that forks ranks end with the process that started it, even by SIGKILL.

Asked to end, as it is by a pipe, a server loads all that it was given first, which may take seconds.
"""

import sys

from hetpipe.runtime.rank_server import die_with_parent

if any("forkserver import main" in word for word in sys.orig_argv):
    die_with_parent()
