-- Formulas as MathML without the TeX that pandoc keeps beside it: the search would find each formula twice.
-- A bracket is as tall as its line unless TeX asks for more: pandoc marks each as stretchy, and browsers draw it too large.
local GROW = { "\\left", "\\right", "\\big", "\\Big", "\\bigg", "\\Bigg" }

local function plain_operators(tex)    -- browsers put spaces around the names of functions: "PR = 1", "1/PR,"
  tex = tex:gsub("\\operatorname{(%a+)}%s*([%a\\])", "\\mathrm{%1}\\,%2")
  return (tex:gsub("\\operatorname{(%a+)}", "\\mathrm{%1}"))
end

function Math(formula)
  if not FORMAT:match("html") then return nil end
  local tex, number = formula.text:match("^(.-)%s*\\qquad(%(%d+%))%s*$")
  local source = plain_operators(tex or formula.text)
  local made = pandoc.Pandoc({ pandoc.Plain({ pandoc.Math(formula.mathtype, source) }) })
  local html = pandoc.write(made, "html", { html_math_method = "mathml" })
  html = html:gsub("<annotation.-</annotation>", ""):gsub("</?semantics>", "")
  local grows = false
  for _, word in ipairs(GROW) do grows = grows or source:find(word, 1, true) end
  if not grows then
    html = html:gsub("<mo([^>]-) stretchy=\"true\"([^>]*)>([%(%)%[%]])</mo>", "<mo%1 stretchy=\"false\"%2>%3</mo>")
    html = html:gsub("<mo([^>]*)>([%(%)%[%]])</mo>", function(attributes, sign)
      if attributes:find("stretchy") then return nil end
      return "<mo" .. attributes .. " stretchy=\"false\">" .. sign .. "</mo>"
    end)
  end
  if number then html = '<span class="numbered">' .. html .. '<span class="number">' .. number .. "</span></span>" end
  return pandoc.RawInline("html", html)
end
