"""The program of the broker's host: Kafka, and a producer that sends the numbers from 0 on into one partition.

It is the supervisor, too, which starts a broker again that was killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster.totals import ROWS, TOPIC
from tests.kafka.broker import KafkaBroker

DOWN_S: Final = 10.0
"""For how long a killed broker stays away."""
_AHEAD: Final = 200 * ROWS
"""How many numbers are there before the query starts: it never reads as many as are sent."""
_ROWS_PER_S: Final = 2 * ROWS


def main(host: str, file: str) -> None:
    """Serve on a host's address, and send, until this process is killed."""
    with KafkaBroker(host) as broker:
        client = {"bootstrap.servers": broker.address}
        admin = AdminClient(client)
        admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(60)
        # Idempotent, and without a limit: each number is sent once and in order, whatever happens to the broker.
        producer = Producer({**client, "enable.idempotence": True, "message.timeout.ms": 0})
        sent = 0

        def send_up_to(end: int) -> None:
            nonlocal sent
            while sent < end:
                try:
                    producer.produce(TOPIC, str(sent).encode(), partition=0)
                    sent += 1
                except BufferError:
                    return
                finally:
                    producer.poll(0)

        send_up_to(_AHEAD)
        producer.flush()
        temporary = Path(f"{file}.tmp")
        temporary.write_text(broker.address)
        temporary.rename(file)
        began_s = time.monotonic()
        while True:
            time.sleep(1)
            send_up_to(_AHEAD + int(_ROWS_PER_S * (time.monotonic() - began_s)))
            if not broker.is_running:
                time.sleep(DOWN_S)
                broker.start_again()


if __name__ == "__main__":
    main(*sys.argv[1:])
