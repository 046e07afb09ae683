"""What happened, as a stream of small records: in memory, for the user's own subscribers, and in the run directory.

Nothing here decides anything, and nothing that writes or reads events can slow, restart or end a rank.
"""

from inprocess.events.record import VERSION, Event, Header, parse, schema, to_line
from inprocess.events.stream import recent, subscribe, unsubscribe

__all__ = ["VERSION", "Event", "Header", "parse", "recent", "schema", "subscribe", "to_line", "unsubscribe"]
