-- Whether an answer holds anything for its reader, and whether it stopped long before it had to, or says that it broke
-- off: noted as `bad`.
--
-- A refusal, a tool call, reasoning or an image is as good as text. Where the shape is not known, or a filter stopped
-- the model, nothing is concluded: an answer that is wrongly called empty would be paid for twice.

-- Reasons to stop after which something should have been said; a filter's is none of them.
local STOPS = { stop = true, end_turn = true, completed = true }
-- Words of engines and providers for an answer that they broke off.
local BROKEN = { abort = true, error = true, insufficient_system_resource = true, network_error = true }
local CAPPED = { length = true, max_tokens = true, max_output_tokens = true }
-- Upstreams quietly lower a cap to what the model can write, and that is never less than this many tokens.
local SMALLEST_CAP = 4096

-- Members that say how rather than what.
local MANNERS = { role = true, type = true, name = true, id = true, signature = true }

-- Whether the value at `i` is a string, a list or an object with something in it.
local function filled(s, i)
  local c = i and byte(s, i)
  if c == QUOTE then return byte(s, i + 1) ~= QUOTE end
  if c == BRACKET then return not find(s, "^%[%s*%]", i) end
  return c == BRACE and not find(s, "^{%s*}", i)
end

-- Whether the object at `i` holds more than manners.
local function holds(s, i)
  if not object(s, i) then return false end
  for key, place in pairs((members(s, i))) do
    if not MANNERS[key] and filled(s, place) then return true end
  end
  return false
end

-- Whether one of the objects in the list at `i` is something to `says`, which is given its members.
local function any(s, i, says)
  local j = i and match(s, "^%[%s*()", i)
  while object(s, j) do
    local at, stop = members(s, j)
    if says(s, at) then return true end
    j = stop and match(s, "^%s*,%s*()", stop)
  end
  return false
end

local function choice_says(s, at) return holds(s, at.message) or holds(s, at.delta) or filled(s, at.text) end

-- One block of Anthropic's content, one item of a Responses output, or one part of that.
local function item_says(s, at)
  local kind = word(s, at.type)
  if kind == "message" then return any(s, at.content, item_says) end
  return (kind ~= "text" and kind ~= "output_text") or filled(s, at.text)
end

-- Whether the answer with members `at` says anything. Nearly all show it at the first look; a key is never found inside
-- a string, whose quotes are escaped.
local function answer_says(s, at)
  if at.choices and find(s, '"content"%s*:%s*"[^"]', at.choices) then return true end
  local blocks = at.content or at.output
  if blocks and find(s, '"text"%s*:%s*"[^"]', blocks) then return true end
  return any(s, at.choices, choice_says) or any(s, at.content, item_says) or any(s, at.output, item_says)
end

-- Whether the event with members `at` does: in Anthropic's and the Responses API's envelopes, and in whole answers.
local function event_says(s, at)
  if at.choices then return any(s, at.choices, choice_says) end
  local kind = word(s, at.type) or ""
  if kind == "content_block_delta" then return holds(s, at.delta) end
  local inner = object(s, at.content_block) or object(s, at.item)
  if inner then return item_says(s, (members(s, inner))) end
  if object(s, at.response) then return answer_says(s, (members(s, at.response))) end
  return find(kind, "^response%.") ~= nil and filled(s, at.delta)
end

-- Whether an answer that says nothing may be whole, as it says that it stopped: a word at which it was to end (`stops`)
-- may be the first of it, and Claude may have nothing to add to what tools answered (`results`).
local function may_say_nothing(finish, asked)
  return asked.stops ~= nil or (asked.results ~= nil and finish == "end_turn")
end

-- What is wrong with an answer that has its end and reports no error: "broken", "empty", "short", or nil. `asked`: what
-- the caller did: it named `cap`, the most output tokens of one choice, or `stops`, or brought `results`.
local function fault_of(notes, says, asked)
  if BROKEN[notes.finish] then return "broken" end
  local silent = not says and (notes.reasoning or 0) == 0
  local hollow = not notes.finish or (STOPS[notes.finish] and not may_say_nothing(notes.finish, asked))
  if silent and hollow then return "empty" end
  local out, cap = notes.out, asked.cap
  if CAPPED[notes.finish] and cap and out and out < SMALLEST_CAP and out * 2 < cap then return "short" end
  return nil
end
