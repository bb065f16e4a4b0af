"""The model server: processes that own weights and optimizer, and workers that send gradients and get weights.

server, worker    the two ends                    together, apart   synchronous and asynchronous rounds
offer, terms      whom a server takes, and how it deals with them
meeting           what workers say to each other in the middle of a batch
keeper, build     weights and their optimizer     running           BatchNorm's statistics
wire, line, peer  messages between them           region, parcel    the payload, in memory that both share
words             what they may say
clocks            who is how far ahead            snapshot          what a server that died goes on from
compress          fewer bytes on the wire         cost              what all that costs
crew, whole       a worker that is several ranks
"""
