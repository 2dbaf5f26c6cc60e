"""From the user's nested state to items: keys, boxes, dtypes, and what their structure is.

Reads the state and changes nothing. Knows nothing of daemons, arenas or files.
"""
