"""How the processes of several hosts know each other: a token that each proves, and channels that prove it.

Nothing that a peer says is parsed before it has proven that it holds the token of the run; what follows is
JSON and bytes, each frame under a MAC. No torch here, and no pickle.

Others use:
    token: run_token, token_for, MAKE_TOKEN
    channel: Channel, Listener, connect, ChannelError, listening_socket
"""
