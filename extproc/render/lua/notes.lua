-- Last on an answer's way back in the classic profile, behind admission: what gates and upstreams tell admission alone is
-- taken away, should admission be away itself. Rate limits are so only where an upstream answered: refusals have their
-- own. `GATE`, the header by which that is known, stands before this text.

function envoy_on_response(handle)
  local headers, names = handle:headers(), { [GATE] = true }
  local answered = headers:get(GATE)
  for name in pairs(headers) do
    local limits = answered and (string.find(name, "ratelimit-", 1, true) or string.find(name, "tokenlimit-", 1, true))
    if limits or string.find(name, "^x%-tg%-") then names[name] = true end
  end
  for name in pairs(names) do headers:remove(name) end
end
