"""Calls from Python workers to the driver, over TCP.

1. `messages` are all that a task, a clock or the doctor can ask, and the replies. A call has one message and a payload
   of bytes, and exactly one reply.
2. `calls` has the server, which runs in the driver, and the client, one per Python process.
3. `channel` frames a connection's bytes and bounds their size.
4. `handshake` lets both sides prove that they know the driver's secret before anything else is read; `tls` encrypts the
   connection where Spark encrypts its own.

While a call waits or is being handled, the server sends beats. A client that receives nothing for some time repeats the
call on a new connection. The server may therefore see a call twice, even at once, and every handler accepts that.

Words of this package:

- endpoint: the server for the tasks' calls, one per driver process.
- pending connection: one that is not authenticated yet.

Does not depend on Spark. Imports only from operators, tables, local, history, log, storage, runs and the core modules.
"""
