"""The Redis schema: names and encodings of all keys, and the scripts that change them atomically. Pure.

Per model of a cluster, under the tag {kv2:<cluster>:<fingerprint>} (one hash slot of a Redis Cluster):

    <tag>:w:<slot>     owner (worker id, incarnation) that the slot is leased to; expires when it falls silent
    <tag>:r:<slot>     set of the hashes that the slot's worker holds, and of an empty text, so that it is never missing
                       unless Redis has lost it; expires, as a backstop. A block that is not in the worker's pool also
                       has a mark: its hash and a byte for its tier, 1 in host memory and 2 on the disk
    <tag>:q:<slot>     sequence number of the last applied batch
    <tag>:slots        hash: slot -> owner, until its sweep has finished
    <tag>:owners       hash: worker id -> slot
    <tag>:dead         hash: slot -> when it was first seen dead (ms, the server's clock; 0: released)
    <tag>:free         set of swept slots
    <tag>:next         number of slots ever assigned
    <tag>:epoch        grows with every change of <tag>:slots
    <tag>:sweeper      lock of the sweeping worker

Another layout needs another tag: {kv:...} had a bitmap of slots for each block, which a sweep had to clear.

And per cluster, under {pd:<cluster>}, <tag>:workers (set of ids) and <tag>:worker:<id> (facts, with a lease).
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.core.errors import ConfigError

MAX_SLOTS: Final = 4096
MAX_WORKERS: Final = 4096
MAX_FACTS_BYTES: Final = 4096

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


def fingerprint_of(hash_seed: bytes) -> str:
    """A short name for a hash seed (WorkerHello.hash_seed), which differs if the KV of two engines differs."""
    return hash_seed[:16].hex()


def index_tag(cluster: str, fingerprint: str) -> str:
    return f"{{kv2:{checked_name('cluster', cluster)}:{checked_name('fingerprint', fingerprint)}}}"


def registry_tag(cluster: str) -> str:
    return f"{{pd:{checked_name('cluster', cluster)}}}"


def checked_name(field: str, name: str) -> str:
    """`name`, checked to contain no character that would end a key's tag. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(field, repr(name), "1 to 128 letters, digits, dots, dashes or underscores")
    return name


def owner_of(worker_id: str, incarnation: str) -> str:
    return f"{worker_id}\n{incarnation}"


def worker_of(owner: bytes) -> str:
    return owner.partition(b"\n")[0].decode("utf-8", "replace")


# --- scripts --------------------------------------------------------------------------------------------------
# In Lua, for server 6.2 and later. Each script takes the tag as KEYS[1] and builds the other keys from it: all lie in
# the tag's hash slot.

_BUMP: Final = """
local function bump(tag)
  if redis.call('EXISTS', tag .. ':epoch') == 0 then
    local now = redis.call('TIME')
    -- Begins at the clock, so that a server that lost everything never repeats an epoch.
    redis.call('SET', tag .. ':epoch', now[1] .. string.format('%06d', now[2]))
  end
  redis.call('INCR', tag .. ':epoch')
end
"""

# ARGV: owner, worker id, lease ms, most slots, "1" to give the present slot up.
# Returns {slot, last sequence, 1 if the slot is new}; slot -1: none left. A new slot is empty: if Redis has evicted
# <tag>:next, numbers come again whose sets still hold the blocks of other workers.
CLAIM: Final = (
    _BUMP
    + """
local tag, owner, worker, lease = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local held = redis.call('HGET', tag .. ':owners', worker)
if held then
  local key = tag .. ':w:' .. held
  if ARGV[5] ~= '1' and redis.call('GET', key) == owner then
    redis.call('PEXPIRE', key, lease)
    return {tonumber(held), tonumber(redis.call('GET', tag .. ':q:' .. held) or '-1'), 0}
  end
  redis.call('DEL', key)
  redis.call('HSET', tag .. ':dead', held, 0)
end
local slot = redis.call('SPOP', tag .. ':free')
if not slot then
  slot = redis.call('INCR', tag .. ':next') - 1
  if slot >= tonumber(ARGV[4]) then
    redis.call('DECR', tag .. ':next')
    return {-1, 0, 0}
  end
end
redis.call('HSET', tag .. ':slots', slot, owner)
redis.call('HSET', tag .. ':owners', worker, slot)
redis.call('SET', tag .. ':w:' .. slot, owner, 'PX', lease)
redis.call('SET', tag .. ':q:' .. slot, 0)
redis.call('UNLINK', tag .. ':r:' .. slot)
bump(tag)
return {tonumber(slot), 0, 1}
"""
)

# ARGV: slot, owner, lease ms, ttl ms of the set. Returns 1 while the lease is held. A worker must not lose its set
# because its cache does not change.
RENEW: Final = """
local key = KEYS[1] .. ':w:' .. ARGV[1]
if redis.call('GET', key) ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1] .. ':r:' .. ARGV[1], ARGV[4])
return redis.call('PEXPIRE', key, ARGV[3])
"""

# ARGV: slot, owner. The slot is masked at once and swept later.
GIVE_UP: Final = (
    _BUMP
    + """
local tag, slot = KEYS[1], ARGV[1]
if redis.call('GET', tag .. ':w:' .. slot) ~= ARGV[2] then return 0 end
redis.call('DEL', tag .. ':w:' .. slot)
redis.call('HSET', tag .. ':dead', slot, 0)
bump(tag)
return 1
"""
)

# ARGV: slot, owner, sequence, ttl ms of the set, stored hashes in one string, removed hashes likewise, new marks
# likewise, removed marks likewise.
# Returns "ok", "lost" (the lease) or "gap" (a batch before this one never came, or Redis has evicted the set). A call
# for each block would cost Redis three times as much as one with many of them.
APPLY: Final = """
local tag, slot = KEYS[1], ARGV[1]
if redis.call('GET', tag .. ':w:' .. slot) ~= ARGV[2] then return 'lost' end
local last, sequence = tonumber(redis.call('GET', tag .. ':q:' .. slot) or '-1'), tonumber(ARGV[3])
if sequence == last then return 'ok' end
if sequence ~= last + 1 then return 'gap' end
local held = tag .. ':r:' .. slot
if last == 0 then
  redis.call('UNLINK', held)
  redis.call('SADD', held, '')
elseif redis.call('EXISTS', held) == 0 then
  return 'gap'
end
local function apply(command, joined, size)
  local members = {}
  for at = 1, #joined, size do members[#members + 1] = string.sub(joined, at, at + size - 1) end
  if #members > 0 then redis.call(command, held, unpack(members)) end
end
apply('SADD', ARGV[5], 16)
apply('SREM', ARGV[6], 16)
apply('SADD', ARGV[7], 17)
apply('SREM', ARGV[8], 17)
redis.call('PEXPIRE', held, ARGV[4])
redis.call('SET', tag .. ':q:' .. slot, sequence)
return 'ok'
"""

# ARGV: grace ms. Returns the slots that may be swept now. A released slot may be swept immediately. Silent slots are
# not swept while they are more than half of all, because then the workers probably cannot reach Redis. After the grace
# time they are swept in any case.
SWEEPABLE: Final = """
local tag = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local given_up, silent, alive = {}, {}, 0
local slots = redis.call('HKEYS', tag .. ':slots')
for _, slot in ipairs(slots) do
  if redis.call('EXISTS', tag .. ':w:' .. slot) == 1 then
    alive = alive + 1
  else
    local since = redis.call('HGET', tag .. ':dead', slot)
    if since == '0' then
      table.insert(given_up, tonumber(slot))
    else
      if not since then
        since = now
        redis.call('HSET', tag .. ':dead', slot, string.format('%.0f', now))
      end
      table.insert(silent, {tonumber(slot), tonumber(since)})
    end
  end
end
local found = given_up
for _, one in ipairs(silent) do
  if #silent <= alive or now - one[2] >= tonumber(ARGV[1]) then table.insert(found, one[1]) end
end
return found
"""

# ARGV: slot. Returns 1 when the slot is free again, -1 when it is leased.
SWEEP: Final = (
    _BUMP
    + """
local tag, slot = KEYS[1], ARGV[1]
if redis.call('EXISTS', tag .. ':w:' .. slot) == 1 then return -1 end
local owner = redis.call('HGET', tag .. ':slots', slot)
if not owner then return -1 end
redis.call('UNLINK', tag .. ':r:' .. slot)
local worker = string.match(owner, '^[^\\n]*')
if redis.call('HGET', tag .. ':owners', worker) == slot then redis.call('HDEL', tag .. ':owners', worker) end
redis.call('HDEL', tag .. ':slots', slot)
redis.call('HDEL', tag .. ':dead', slot)
redis.call('DEL', tag .. ':q:' .. slot)
redis.call('SADD', tag .. ':free', slot)
bump(tag)
return 1
"""
)

# ARGV: a hash, slots. Returns the epoch, and for each slot 1 if it holds the hash, otherwise 0.
HOLDERS: Final = """
local tag, hash, held = KEYS[1], ARGV[1], {}
for index = 2, #ARGV do held[#held + 1] = redis.call('SISMEMBER', tag .. ':r:' .. ARGV[index], hash) end
return {redis.call('GET', tag .. ':epoch') or '', table.concat(held)}
"""

# ARGV: a chain of hashes in one string, most probes, slots. Returns the epoch, and for each slot the number of the
# chain's leading blocks that it holds; unless its pool has all of them, also how many are in the pool, and how many in
# the pool or in host memory, as "depth/pool/memory".
#
# A slot with the first block is asked for this many at equal distances, the last among them, and then searched by
# bisection before the first that is missing. The depth of the slot before is tried first, because workers often hold
# the same shared prefix. A cache evicts leaves first, so a worker that holds a block nearly always holds those before
# it; a damaged block may be gone from the middle, and is noticed if it is asked for. For the same reason, all blocks
# are in the pool if the last one is, and the first mark is searched by bisection otherwise.
LOOKUP: Final = """
local tag, hashes = KEYS[1], ARGV[1]
local count = #hashes / 16
local step = math.ceil(count / tonumber(ARGV[2]))
local function block(at) return string.sub(hashes, 16 * at - 15, 16 * at) end
local first, places, probes = block(1), {}, {}
for at = step, count + step - 1, step do
  places[#places + 1] = math.min(at, count)
  probes[#probes + 1] = block(math.min(at, count))
end
-- Where to look next: first at `guess` and after it, then in the middle.
local function between(low, high, guess)
  if guess == low then return low + 1 end
  if guess > low and guess < high then return guess end
  return math.floor((low + high) / 2)
end
-- The number of leading blocks without one of the marks, at least `low`; block `high` has one.
local function unmarked(key, low, high, guess, marks)
  while high - low > 1 do
    local middle = between(low, high, guess)
    local hash, found = block(middle), 0
    for _, mark in ipairs(marks) do found = found + redis.call('SISMEMBER', key, hash .. mark) end
    if found == 0 then low = middle else high = middle end
  end
  return low
end
local depths, depth, before = {}, 0, 0
local pool, memory = -1, -1  -- of the last slot that has marks
for index = 3, #ARGV do
  local key, missing = tag .. ':r:' .. ARGV[index], 1
  before, depth = depth > 0 and depth or before, 0
  if redis.call('SISMEMBER', key, first) == 1 then
    depth, missing = 1, count + 1
    for at, is_held in ipairs(redis.call('SMISMEMBER', key, unpack(probes))) do
      if is_held == 0 then
        missing = places[at]
        break
      end
      depth = places[at]
    end
  end
  while missing - depth > 1 do
    local middle = between(depth, missing, before)
    if redis.call('SISMEMBER', key, block(middle)) == 1 then depth = middle else missing = middle end
  end
  local found = tostring(depth)
  if depth > 0 then
    local last = block(depth)
    local marks = redis.call('SMISMEMBER', key, last .. '\1', last .. '\2')
    if marks[1] + marks[2] > 0 then
      pool = unmarked(key, 0, depth, pool, {'\1', '\2'})
      memory = marks[2] == 1 and unmarked(key, pool, depth, memory, {'\2'}) or depth
      found = depth .. '/' .. pool .. '/' .. memory
    end
  end
  depths[#depths + 1] = found
end
return {redis.call('GET', tag .. ':epoch') or '', table.concat(depths, ' ')}
"""

# Registry. ARGV: worker id, incarnation, facts, lease ms, "1" when this incarnation has just begun.
# Returns 0 when a newer incarnation has taken the name, else 1.
REGISTER: Final = """
local tag, key = KEYS[1], KEYS[1] .. ':worker:' .. ARGV[1]
local held = redis.call('HGET', key, 'incarnation')
if held and held ~= ARGV[2] and ARGV[5] ~= '1' then return 0 end
redis.call('HSET', key, 'incarnation', ARGV[2], 'facts', ARGV[3])
redis.call('PEXPIRE', key, ARGV[4])
redis.call('SADD', tag .. ':workers', ARGV[1])
return 1
"""

# ARGV: worker id, incarnation.
DEREGISTER: Final = """
local tag, key = KEYS[1], KEYS[1] .. ':worker:' .. ARGV[1]
if redis.call('HGET', key, 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', key)
redis.call('SREM', tag .. ':workers', ARGV[1])
return 1
"""
