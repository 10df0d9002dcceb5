"""The gRPC side of the server: messages in, values down; values up, messages out. Handlers convert, call and convert."""
