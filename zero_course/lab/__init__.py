"""What demo and labs are made of: ranks as processes, predictions, measurements, reports, figures.

- :mod:`.processes` runs a function on every rank and brings the results home; :mod:`.rank` is a rank's side of it;
- :mod:`.predict` says what a rung should keep and send, from the model's shapes alone;
- :mod:`.training` trains the course's GPT under a rung and measures;
- :mod:`.wire` reads the network interface in a network of our own;
- :mod:`.ladder` has the checks that labs 02 to 04 share;
- :mod:`.report` prints predicted against measured, writes report.json and ends in an exit code;
- :mod:`.plots` draws.
"""
